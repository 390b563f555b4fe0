/* Messages go to the logger that NCCL passes to init, and nowhere else. */
#ifndef CHECKMATE_LOG_H
#define CHECKMATE_LOG_H

#include "nccl/common_abi.h"

/* Keeps the first logger that is not NULL. */
void ckm_log_set(nccl_logger_t logger);

__attribute__((format(printf, 5, 6))) void ckm_log(nccl_log_level_t level, unsigned long subsys, const char *file,
                                                   int line, const char *fmt, ...);

#define CKM_WARN(...) ckm_log(NCCL_LOG_WARN, NCCL_SUBSYS_NET, __FILE__, __LINE__, __VA_ARGS__)
#define CKM_INFO(...) ckm_log(NCCL_LOG_INFO, NCCL_SUBSYS_NET, __FILE__, __LINE__, __VA_ARGS__)

#endif
