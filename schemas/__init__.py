"""Every message of the system, one module per stream or subject family.

Messages are frozen msgspec structs in array layout. Fields are only ever appended, with defaults; any
other change is a new tag. `subjects` is the only place in the project that spells a subject.
"""
