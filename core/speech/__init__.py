"""What every voice shares, whichever modality or plugin it comes from.

script     what is to be said: texts at a pace, and pauses; read from plain text, SSML or phonemes
telling    the engine's half: sound on its way out, with the times of its words
stretch    another pace at the same pitch, for voices that know only one
presenter  the front's half: sound becomes answers
"""
