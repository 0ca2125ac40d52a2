"""Coverage-guided fuzzing, each module a target: ``one_input`` takes any bytes and fails where they break a promise.

``make fuzz`` looks for such bytes with atheris; without it the tests read the corpora again (``test_corpus.py``).
"""
