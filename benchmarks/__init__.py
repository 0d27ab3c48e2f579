"""One script per question; results are committed as JSON, tables are generated from them."""
