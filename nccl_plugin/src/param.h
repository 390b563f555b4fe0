/* The environment variables that the plugin reads: one table, in param.c. */
#ifndef CHECKMATE_PARAM_H
#define CHECKMATE_PARAM_H

enum ckm_param {
    CKM_IFNAME,
    CKM_COUNTER_MAP,
    CKM_DSCP,
    CKM_TIMEOUT_MS,
    CKM_SOCKET_BUFFER,
    CKM_HOST_RANKS,
    CKM_GROUP,
    CKM_PARAMS,
};

/* Values are read from the environment once, at the first use of any. */
const char *ckm_param_text(enum ckm_param param);
long ckm_param_number(enum ckm_param param);

/* Reads the environment again; for tests. */
void ckm_param_reload(void);

#endif
