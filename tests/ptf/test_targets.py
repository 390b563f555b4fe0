"""Which targets the packet tests run on here, and that those are there."""

import pytest
from ptf.frames import tcp
from ptf.rules import rules
from ptf.target import TARGETS, SwitchUnderTest, missing

pytestmark = pytest.mark.root


@pytest.mark.parametrize("name", TARGETS)
def test_the_packet_tests_run_on(name: str) -> None:
    if reason := missing(name):
        pytest.skip(reason)


def test_a_switch_starts_empty_and_does_as_it_is_told(running_switch: SwitchUnderTest) -> None:
    assert running_switch.control.read() == running_switch.rules, "nothing has been written yet"
    running_switch.program(rules())
    assert sorted(port for port, got in running_switch.expect((1, tcp(1, 2))).items() if got) == [2, 5]
