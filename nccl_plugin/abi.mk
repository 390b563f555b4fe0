# $(call abi,HEADERS) defines what src/abi.c exports: a digest of the headers that Python reads too (checkmate/native.py).
abi = -DCHECKMATE_ABI=0x$(shell cat $(1) | sha256sum | cut -c1-16)ull
