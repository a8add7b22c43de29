"""Everything that lives on a subject: the runtime, and one file per actor."""
