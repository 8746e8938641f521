"""`megalin launch`: starts the ranks of one host, watches them, and ends all where one fails."""
