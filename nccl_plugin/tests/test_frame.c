/* The frame check under damage: every single bit flip, and random ones, must be noticed. */
#include "checkmate/crc32c.h"
#include "frame.h"
#include "test.h"

static struct ckm_frame sound(uint8_t flags)
{
    struct ckm_frame f = {.magic = CKM_WIRE_MAGIC, .version = CKM_WIRE_VERSION, .flags = flags};
    f.message = 12345;
    f.payload_len = 1000;
    f.header_crc = ckm_crc32c(0, &f, offsetof(struct ckm_frame, header_crc));
    return f;
}

static void flip(struct ckm_frame *f, unsigned bit)
{
    ((unsigned char *)f)[bit / 8] ^= (unsigned char)(1u << bit % 8);
}

static void test_single_flips(void)
{
    for (unsigned bit = 0; bit < 8 * CKM_HEADER_BYTES; bit++) {
        struct ckm_frame f = sound(0);
        flip(&f, bit);
        CHECK(ckm_frame_check(&f, false));
    }
}

static void test_random_damage(void)
{
    uint64_t seed = 7;

    for (int round = 0; round < 20000; round++) {
        struct ckm_frame f = sound(CKM_FLAG_TAGGED | CKM_FLAG_PAYLOAD_CRC), before = f;
        for (unsigned n = 1 + random_u32(&seed) % 20; n; n--)
            flip(&f, random_u32(&seed) % (8 * CKM_HEADER_BYTES));
        if (memcmp(&f, &before, sizeof f))
            CHECK(ckm_frame_check(&f, true));
    }
}

int main(void)
{
    struct ckm_frame f = sound(0);
    CHECK(!ckm_frame_check(&f, false));
    CHECK(ckm_frame_check(&f, true)); /* plain, on the tagged flow */
    f = sound(CKM_FLAG_TAGGED);
    CHECK(!ckm_frame_check(&f, true));
    CHECK(ckm_frame_check(&f, false));
    f.payload_len = CKM_MAX_PAYLOAD + 1;
    f.header_crc = ckm_crc32c(0, &f, offsetof(struct ckm_frame, header_crc));
    CHECK(ckm_frame_check(&f, true));
    test_single_flips();
    test_random_damage();
    return 0;
}
