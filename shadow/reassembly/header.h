/* Checks of a frame header before anything in it is believed. */
#ifndef CHECKMATE_REASSEMBLY_HEADER_H
#define CHECKMATE_REASSEMBLY_HEADER_H

#include <stddef.h>

#include "checkmate/wire.h"

/* Magic and CRC: whether these bytes are a header at all. */
int ckm_header_intact(const uint8_t bytes[CKM_HEADER_BYTES]);
/* 0 when a shadow can use the frame, else -1 with the field, its value and what is allowed in error. */
int ckm_header_check(const struct ckm_frame *header, uint64_t max_op_bytes, char *error, size_t error_size);
/* Bytes of an element, 0 for a number that NCCL does not define. */
uint32_t ckm_datatype_bytes(uint8_t datatype);

#endif
