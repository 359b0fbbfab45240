//! What one client may make this door hold, by name.

/// The most arguments of one command, its name included.
pub const MAX_ARGUMENTS: usize = 1_024;

/// The longest argument, in bytes.
pub const MAX_BULK_BYTES: usize = 65_536;

/// The longest inline command, in bytes, its line end not counted.
pub const MAX_INLINE_BYTES: usize = 65_536;

/// The longest command as it is on the wire: 64 entries of the longest names and values, and some. All
/// commands of a transaction together may be as long.
pub const MAX_COMMAND_BYTES: usize = 786_432;

/// The most commands that are taken apart before the first of them is run: as many as the store fetches the memory of, and so
/// few that a worker's list of their arguments takes no more than half a mebibyte.
pub const MAX_TOGETHER: usize = tidegate_core::MemoryStore::PREFETCHED;

/// How much is read at once.
pub const READ_BYTES: usize = 32_768;

/// How much may be ready for a client before nothing more of it is read or decided. The answer that
/// crosses the line is still written out whole.
pub const OUTPUT_BYTES: usize = 65_536;

/// The longest beginning of a command that is free: one that is longer counts against
/// [`MAX_HELD_BYTES`].
pub const SMALL_BYTES: usize = 4_096;

/// The most that all the connections of one worker may hold together, in commands that have not arrived
/// whole, open transactions, decisions that wait for Redis, and answers that have not been taken. One that would hold more is closed.
pub const MAX_HELD_BYTES: usize = 64 << 20;

/// The longest name of a connection, library or library version.
pub const MAX_NAME_BYTES: usize = 256;

/// How much a client may still send after the answer that ends its connection, for it to read that answer.
pub const LINGER_BYTES: usize = 1 << 20;

/// The most decisions of one client that are asked of Redis at the same time; further commands are read when those of a batch are
/// answered, and further ones of a transaction wait their turn.
pub const MAX_WAITING: usize = 1_024;
