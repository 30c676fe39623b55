"""The tests of the laboratory share ``pretend`` beside this file, which pytest finds because this file is here."""
