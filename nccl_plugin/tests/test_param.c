/* The parameter table: defaults, limits, and what is not usable. */
#include "checkmate/api.h"
#include "log.h"
#include "param.h"
#include "test.h"

static void test_defaults(void)
{
    CHECK_EQ(ckm_param_number(CKM_TIMEOUT_MS), 60000);
    CHECK_EQ(ckm_param_number(CKM_DSCP), 0x20);
    CHECK_EQ(ckm_param_number(CKM_SOCKET_BUFFER), 0);
    CHECK(strcmp(ckm_param_text(CKM_IFNAME), "") == 0);
}

static void test_environment(void)
{
    setenv("CHECKMATE_DSCP", "0x2a", 1);
    setenv("CHECKMATE_IFNAME", "=eth1", 1);
    ckm_param_reload();
    CHECK_EQ(ckm_param_number(CKM_DSCP), 42);
    CHECK(strcmp(ckm_param_text(CKM_IFNAME), "=eth1") == 0);
}

static void test_unusable(const char *value)
{
    int before = warnings;
    setenv("CHECKMATE_DSCP", value, 1);
    ckm_param_reload();
    CHECK_EQ(ckm_param_number(CKM_DSCP), 0x20);
    CHECK_EQ(warnings, before + 1);
    CHECK(strstr(last_warning, "CHECKMATE_DSCP"));
}

static void test_too_long(void)
{
    char text[5000];
    int before = warnings;

    memset(text, 'x', sizeof text - 1);
    text[sizeof text - 1] = 0;
    setenv("CHECKMATE_IFNAME", text, 1);
    ckm_param_reload();
    CHECK(strcmp(ckm_param_text(CKM_IFNAME), "") == 0);
    CHECK(warnings > before);
}

static void test_listing(void)
{
    struct checkmate_param p;
    int n = 0;

    for (; checkmate_get_param(n, &p) == 0; n++) {
        CHECK(strncmp(p.name, "CHECKMATE_", 10) == 0);
        CHECK(strlen(p.help) > 20);
        CHECK(p.value && p.fallback);
    }
    CHECK_EQ(n, CKM_PARAMS);
    CHECK_EQ(checkmate_get_param(-1, &p), -1);
}

int main(void)
{
    ckm_log_set(test_logger);
    test_defaults();
    test_environment();
    test_unusable("64");
    test_unusable("0");
    test_unusable("8 ");
    test_unusable("");
    unsetenv("CHECKMATE_DSCP");
    test_too_long();
    test_listing();
    return 0;
}
