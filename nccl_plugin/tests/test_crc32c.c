/* CRC32C against the vectors of RFC 3720, appendix B.4, and the two versions against each other. */
#include "checkmate/crc32c.h"
#include "test.h"

static void check(const unsigned char *data, size_t bytes, uint32_t expected)
{
    CHECK_EQ(ckm_crc32c(0, data, bytes), expected);
    CHECK_EQ(ckm_crc32c_portable(0, data, bytes), expected);
}

static void test_rfc3720(void)
{
    unsigned char data[48] = {0};
    static const unsigned char command[48] = {
        0x01, 0xc0, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
        0x14, 0x00, 0x00, 0x00, 0x00, 0x00, 0x04, 0x00, 0x00, 0x00, 0x00, 0x14, 0x00, 0x00, 0x00, 0x18,
        0x28, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x02, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
    };

    check(data, 32, 0x8a9136aa);
    memset(data, 0xff, 32);
    check(data, 32, 0x62a8ab43);
    for (int i = 0; i < 32; i++)
        data[i] = (unsigned char)i;
    check(data, 32, 0x46dd794e);
    for (int i = 0; i < 32; i++)
        data[i] = (unsigned char)(31 - i);
    check(data, 32, 0x113fdb5c);
    check(command, 48, 0xd9963a56);
    check((const unsigned char *)"123456789", 9, 0xe3069283);
    check(data, 0, 0);
}

static void test_versions_agree(void)
{
    enum { BYTES = 40000 };
    unsigned char *data = malloc(BYTES + 8);
    uint64_t seed = 1;

    for (int i = 0; i < BYTES + 8; i++)
        data[i] = (unsigned char)random_u32(&seed);
    for (int round = 0; round < 300; round++) {
        size_t bytes = random_u32(&seed) % BYTES, cut = bytes ? random_u32(&seed) % bytes : 0;
        const unsigned char *p = data + random_u32(&seed) % 8;
        uint32_t whole = ckm_crc32c_portable(0, p, bytes);
        CHECK_EQ(ckm_crc32c(0, p, bytes), whole);
        CHECK_EQ(ckm_crc32c(ckm_crc32c(0, p, cut), p + cut, bytes - cut), whole);
    }
    free(data);
}

int main(void)
{
    test_rfc3720();
    test_versions_agree();
    return 0;
}
