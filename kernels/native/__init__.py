"""Plain C for the one token of an answer: compiled where it runs, torch's twins where it cannot."""
