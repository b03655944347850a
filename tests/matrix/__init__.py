"""The matrix of conditions and outcomes in connector/MATRIX.md, made from the tests that show it.

A test that shows a row carries it as a marker; `make matrix` writes the page. No engine is needed to read the markers.
"""
