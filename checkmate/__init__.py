"""Checkmate: every data-parallel training iteration is a checkpoint, at no cost to the trainer."""
