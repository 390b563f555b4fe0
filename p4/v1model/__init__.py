"""The switch as a P4 program for BMv2, and BMv2 as a process."""
