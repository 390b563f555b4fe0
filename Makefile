# Builds the C and BPF parts into checkmate/_lib, where the Python package finds them.
OUT := $(CURDIR)/checkmate/_lib
PARTS := nccl_plugin p4/ebpf shadow checkmate/persist

all test clean: $(PARTS)
$(PARTS):
	$(MAKE) -C $@ OUT=$(OUT) $(MAKECMDGOALS)

.PHONY: all test clean $(PARTS)
