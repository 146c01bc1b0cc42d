"""Result files in; one page, figures and tables out. Trains nothing and imports nothing that does."""
