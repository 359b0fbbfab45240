//! Bounds on the memory that one client can make this listener use.

/// The maximum number of arguments of a command, including its name.
pub const MAX_ARGUMENTS: usize = 1_024;

/// The maximum length of an argument, in bytes.
pub const MAX_BULK_BYTES: usize = 65_536;

/// The maximum length of an inline command in bytes, excluding its line terminator.
pub const MAX_INLINE_BYTES: usize = 65_536;

/// The maximum length of a command on the wire, in bytes. It is enough for 64 entries with the
/// longest names and values. The total length of a transaction's commands must not exceed this
/// maximum either.
pub const MAX_COMMAND_BYTES: usize = 786_432;

/// The maximum number of commands that are parsed before the first of them is run. It equals the
/// number of keys that the store prefetches. It also keeps a worker's argument list below 512 KiB.
pub const MAX_TOGETHER: usize = tidegate_core::MemoryStore::PREFETCHED;

/// The size of the read buffer, in bytes.
pub const READ_BYTES: usize = 32_768;

/// The output size in bytes above which no more commands are read or run until the client has read
/// the output. A response that crosses this limit is still written completely.
pub const OUTPUT_BYTES: usize = 65_536;

/// The maximum length in bytes of an incomplete command that does not count towards
/// [`MAX_HELD_BYTES`].
pub const SMALL_BYTES: usize = 4_096;

/// The maximum memory in bytes that all connections of a worker may hold in total: incomplete
/// commands, open transactions, pending Redis decisions and unread responses. A connection that
/// would exceed this maximum is closed.
pub const MAX_HELD_BYTES: usize = 64 << 20;

/// The maximum length in bytes of a connection name, library name or library version.
pub const MAX_NAME_BYTES: usize = 256;

/// The maximum number of bytes that the server reads and discards after its last response. Without
/// these reads, the operating system could reset the connection before the client has read the
/// response.
pub const LINGER_BYTES: usize = 1 << 20;

/// The maximum number of concurrent Redis decisions for one client. Further commands are read only
/// when the replies to the batch are complete. If a transaction contains more commands, the excess
/// commands wait.
pub const MAX_WAITING: usize = 1_024;
