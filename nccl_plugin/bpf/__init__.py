"""The counter program: writes the byte position of the tagged flow into a TCP option."""
