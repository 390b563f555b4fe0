"""What people and a switch's own tools are shown of a plan: tables, a picture, a Tofino's set-up script."""
