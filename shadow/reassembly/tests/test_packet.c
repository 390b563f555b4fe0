/* The packet parser: what is a copy, what isn't, and that no byte string makes it read outside. */
#include "frames.h"

static enum ckm_packet parse(const uint8_t *packet, uint32_t n, struct ckm_segment *segment)
{
    uint8_t *exact = malloc(n ? n : 1);
    memcpy(exact, packet, n);
    enum ckm_packet kind = ckm_packet_parse(exact, n, CKM_DSCP_TAG_DEFAULT, segment);
    if (kind == CKM_PACKET_COPY) {
        CHECK(segment->length > 0 && segment->data >= exact && segment->data + segment->length <= exact + n);
        segment->data = packet + (segment->data - exact);
    }
    free(exact);
    return kind;
}

static void test_copy_and_padding(void)
{
    uint8_t packet[MAX_PACKET] = {0};
    struct ckm_segment segment;
    uint32_t n = make_packet(packet, 3, 0xfffffff0u, (const uint8_t *)"abcd", 4);
    CHECK(parse(packet, n, &segment) == CKM_PACKET_COPY);
    CHECK(segment.seq == 0xfffffff0u && segment.length == 4 && !memcmp(segment.data, "abcd", 4));
    CHECK(segment.key.src_port == htons(4003) && segment.key.dst_port == htons(5000));
    CHECK(parse(packet, 60, &segment) == CKM_PACKET_COPY && segment.length == 4); /* Ethernet padding is no payload */
}

static void test_options_are_skipped(void)
{
    uint8_t packet[MAX_PACKET], moved[MAX_PACKET];
    struct ckm_segment segment;
    uint32_t n = make_packet(packet, 0, 5, (const uint8_t *)"xxxxxxxxDATA", 12);
    packet[14 + 20 + 12] = 7 << 4;
    CHECK(parse(packet, n, &segment) == CKM_PACKET_COPY && segment.length == 4 && !memcmp(segment.data, "DATA", 4));
    memcpy(moved, packet, n); /* the same with an IP header of six words */
    moved[14] = 0x46;
    memmove(moved + 14 + 24, moved + 14 + 20, 32);
    moved[14 + 3] += 4;
    CHECK(parse(moved, n + 4, &segment) == CKM_PACKET_COPY && segment.length == 4 && segment.seq == 5);
}

struct change {
    uint32_t at;
    uint8_t value;
    enum ckm_packet kind;
};

static void test_each_field(void)
{
    static const struct change changes[] = {
        {13, 6, CKM_PACKET_OTHER},          /* ARP */
        {14, 0x65, CKM_PACKET_OTHER},       /* version 6 */
        {14, 0x44, CKM_PACKET_MALFORMED},   /* header of four words */
        {14, 0x4f, CKM_PACKET_MALFORMED},   /* header longer than the packet */
        {15, 0x40, CKM_PACKET_OTHER},       /* another DSCP bit */
        {15, 0xfc, CKM_PACKET_COPY},        /* ours among others */
        {17, 39, CKM_PACKET_MALFORMED},     /* total length without room for a TCP header */
        {17, 40, CKM_PACKET_OTHER},         /* no payload */
        {17, 45, CKM_PACKET_TRUNCATED},     /* one byte more than there is */
        {16, 255, CKM_PACKET_TRUNCATED},    /* */
        {20, 0x40, CKM_PACKET_COPY},        /* don't fragment */
        {20, 0x20, CKM_PACKET_MALFORMED},   /* more fragments */
        {21, 1, CKM_PACKET_MALFORMED},      /* a later fragment */
        {23, 17, CKM_PACKET_OTHER},         /* UDP */
        {46, 4 << 4, CKM_PACKET_MALFORMED}, /* TCP header of four words */
        {46, 15 << 4, CKM_PACKET_MALFORMED} /* TCP header longer than the packet */
    };
    for (size_t i = 0; i < sizeof changes / sizeof *changes; i++) {
        uint8_t packet[MAX_PACKET];
        struct ckm_segment segment;
        uint32_t n = make_packet(packet, 0, 5, (const uint8_t *)"abcd", 4);
        note_seed(i);
        packet[changes[i].at] = changes[i].value;
        CHECK(parse(packet, n, &segment) == changes[i].kind);
    }
}

static void test_any_bytes(void)
{
    for (uint64_t s = 1; s <= 20000; s++) {
        seed(s);
        uint8_t packet[MAX_PACKET];
        struct ckm_segment segment;
        uint8_t content[64] = {1};
        uint32_t n = make_packet(packet, 0, rnd(UINT32_MAX), content, rnd(64));
        for (uint32_t flips = rnd(6); flips--;)
            packet[rnd(n)] ^= (uint8_t)(1 << rnd(8));
        parse(packet, rnd(n + 1), &segment);
        for (uint32_t i = 0; i < n; i++)
            packet[i] = (uint8_t)rnd(256);
        parse(packet, n, &segment);
    }
}

int main(void)
{
    test_copy_and_padding();
    test_options_are_skipped();
    test_each_field();
    test_any_bytes();
    return 0;
}
