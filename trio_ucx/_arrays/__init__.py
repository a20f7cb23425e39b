"""Arrays as messages: a header that says what they are, and their bytes.

``header`` is the format, ``describe`` what it says of an object, ``messages`` sends and receives. Imported when an
array is first sent or received.
"""
