"""Nobody's API: what several rooms use and no user should see.

======================  ========================================================
file                    what is in it
======================  ========================================================
``array_like``          reading what users give as an array
``arrays``              numpy and torch alike: backends, working precision
``inputs``              the checks of a problem's W, k and protected vertices
``files``               the one writer: aside, synced, renamed
``sealed``              safetensors files that know whether they are whole
``optional``            libraries that may be missing
``progress``            a progress bar where somebody waits
``terminal``            tables and letters that a terminal can show
======================  ========================================================
"""
