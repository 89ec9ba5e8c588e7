"""Result model of a verification run and its writers."""
