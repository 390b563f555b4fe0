# The ring engine: libcheckmate_ring.so and its tests. Included by ../Makefile.
RING_BUILD := $(BUILD)/ring
RING_SOURCES := $(filter-out ring/reduce_kernels.c,$(wildcard ring/*.c))
RING_CFLAGS := -std=c11 -D_GNU_SOURCE -O2 -g -fPIC -fvisibility=hidden -Wall -Wextra -Werror -Iinclude -Iring -pthread
RING_KERNEL_CFLAGS := $(RING_CFLAGS) -O3 -ffp-contract=off
RING_SANITIZE := -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer

# The wider instruction set is chosen at run time.
RING_VARIANTS := base
ifeq ($(shell uname -m),x86_64)
RING_VARIANTS += v3
RING_CFLAGS += -DCKM_RING_V3
RING_MARCH_v3 := -march=x86-64-v3
endif

RING_OBJECTS := $(RING_SOURCES:ring/%.c=$(RING_BUILD)/%.o) $(RING_VARIANTS:%=$(RING_BUILD)/kernels_%.o)
RING_TEST_OBJECTS := $(RING_OBJECTS:$(RING_BUILD)/%=$(RING_BUILD)/asan/%)
RING_TESTS := $(patsubst ring/tests/test_%.c,$(RING_BUILD)/test_%,$(wildcard ring/tests/test_*.c))
RING_MOCK := $(RING_BUILD)/libmock_plugin.so

ring: $(OUT)/libcheckmate_ring.so
ring-mock: $(RING_MOCK)
ring-test: $(RING_TESTS) $(RING_MOCK)
	set -e; for t in $(RING_TESTS); do $$t $(RING_MOCK); done
ring-clean:
	rm -rf $(RING_BUILD) $(OUT)/libcheckmate_ring.so
all: ring
test: ring-test
clean: ring-clean

$(OUT)/libcheckmate_ring.so: $(RING_OBJECTS) $(RING_BUILD)/abi.o
	$(CC) -shared -pthread -Wl,--no-undefined -o $@ $^ -ldl
$(RING_BUILD)/abi.o: src/abi.c ring/ring.h abi.mk
	@mkdir -p $(@D)
	$(CC) $(RING_CFLAGS) $(call abi,ring/ring.h) -c -o $@ $<
$(RING_BUILD)/%.o: ring/%.c
	@mkdir -p $(@D)
	$(CC) $(RING_CFLAGS) -MMD -c -o $@ $<
$(RING_VARIANTS:%=$(RING_BUILD)/kernels_%.o): $(RING_BUILD)/kernels_%.o: ring/reduce_kernels.c
	@mkdir -p $(@D)
	$(CC) $(RING_KERNEL_CFLAGS) $(RING_MARCH_$*) -DKERNELS=ckm_kernels_$* -MMD -c -o $@ $<

$(RING_BUILD)/asan/%.o: ring/%.c
	@mkdir -p $(@D)
	$(CC) $(RING_CFLAGS) $(RING_SANITIZE) -MMD -c -o $@ $<
$(RING_VARIANTS:%=$(RING_BUILD)/asan/kernels_%.o): $(RING_BUILD)/asan/kernels_%.o: ring/reduce_kernels.c
	@mkdir -p $(@D)
	$(CC) $(RING_KERNEL_CFLAGS) $(RING_SANITIZE) $(RING_MARCH_$*) -DKERNELS=ckm_kernels_$* -MMD -c -o $@ $<
$(RING_BUILD)/test_%: ring/tests/test_%.c $(RING_TEST_OBJECTS)
	$(CC) $(RING_CFLAGS) $(RING_SANITIZE) -o $@ $< $(RING_TEST_OBJECTS) -ldl -lm
$(RING_MOCK): ring/tests/mock_plugin.c
	@mkdir -p $(@D)
	$(CC) $(RING_CFLAGS) -fsanitize=address,undefined -shared -o $@ $<

# Not to be remade by the built-in rule for executables.
$(RING_BUILD)/%.d: ;
-include $(wildcard $(RING_BUILD)/*.d $(RING_BUILD)/asan/*.d)
.PHONY: ring ring-mock ring-test ring-clean
