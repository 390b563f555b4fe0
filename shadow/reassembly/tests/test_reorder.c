/* The out-of-order store against a plain array of bytes. */
#include "frames.h"

#define SPAN 600u

static void check_against(const struct ckm_reorder *held, const uint8_t *present, const uint8_t *content)
{
    uint64_t at = 0, bytes = 0;
    for (const struct ckm_piece *p = held->first; p; p = p->next) {
        CHECK(p->length > 0 && p->offset >= at);
        for (; at < p->offset; at++)
            CHECK(!present[at]);
        for (uint32_t i = 0; i < p->length; i++, at++)
            CHECK(present[at] && p->data[i] == content[at]);
        bytes += sizeof *p + p->length;
        CHECK(p->next ? p->next->prev == p : held->last == p);
    }
    for (; at < SPAN; at++)
        CHECK(!present[at]);
    CHECK(bytes == held->bytes);
}

static void test_random_pieces(void)
{
    for (uint64_t s = 1; s <= 300; s++) {
        seed(s);
        struct ckm_reorder held = {0};
        uint8_t present[SPAN] = {0}, content[SPAN];
        for (unsigned i = 0; i < SPAN; i++)
            content[i] = (uint8_t)rnd(256);
        for (unsigned i = 0; i < 60; i++) {
            uint32_t from = rnd(SPAN - 1), n = 1 + rnd(SPAN - from < 40 ? SPAN - from : 40), fresh = 0;
            for (uint32_t j = from; j < from + n; j++)
                fresh += !present[j];
            memset(present + from, 1, n);
            CHECK(ckm_reorder_insert(&held, from, content + from, n, i) == fresh);
            check_against(&held, present, content);
        }
        while (held.first) {
            memset(present + held.first->offset, 0, held.first->length);
            ckm_reorder_pop(&held);
            check_against(&held, present, content);
        }
        CHECK(held.bytes == 0 && !held.last);
    }
}

int main(void)
{
    test_random_pieces();
    return 0;
}
