/* CHECKMATE_IFNAME's syntax, and what is found out about a real interface. */
#include "device.h"
#include "test.h"

int main(void)
{
    CHECK(ckm_device_selected("eth", "eth0"));
    CHECK(ckm_device_selected("ib,eth", "eth17"));
    CHECK(!ckm_device_selected("eth1", "eth0"));
    CHECK(ckm_device_selected("=eth1", "eth1"));
    CHECK(!ckm_device_selected("=eth1", "eth10"));
    CHECK(!ckm_device_selected("=eth", "eth1"));
    CHECK(ckm_device_selected("=eth1,eth2", "eth2"));
    CHECK(!ckm_device_selected("^docker,lo", "lo"));
    CHECK(ckm_device_selected("^docker,lo", "eth0"));
    CHECK(!ckm_device_selected("^=eth1", "eth1"));
    CHECK(ckm_device_selected("^=eth1", "eth10"));
    CHECK(!ckm_device_selected("", "eth0"));
    CHECK(!ckm_device_selected(",,", "eth0"));
    CHECK(ckm_device_selected("^", "lo"));

    setenv("CHECKMATE_IFNAME", "=lo", 1);
    CHECK_EQ(ckm_devices(), 1);
    CHECK(strcmp(ckm_device(0)->name, "lo") == 0);
    CHECK_EQ(ckm_device(0)->mtu, 65536);
    CHECK(ckm_device(0)->speed > 0);
    CHECK(ckm_device(0)->pci_path[0] == 0);
    CHECK(!ckm_device(1) && !ckm_device(-1));
    return 0;
}
