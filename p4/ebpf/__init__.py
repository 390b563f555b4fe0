"""The switch as a tc/BPF data path in the Linux kernel, with a P4Runtime server in front of it."""
