//! Bounds on the memory that one client can make the listener use.

/// The maximum number of arguments of a command, including its name.
pub const MAX_ARGUMENTS: usize = 1_024;

/// The maximum length of an argument, in bytes.
pub const MAX_BULK_BYTES: usize = 65_536;

/// The maximum length of an inline command in bytes, excluding its line terminator.
pub const MAX_INLINE_BYTES: usize = 65_536;

/// The maximum length of a command on the wire, in bytes. A command with 64 entries fits, even if
/// all names and values have the maximum length. The maximum also applies to the total length of a
/// transaction's commands.
pub const MAX_COMMAND_BYTES: usize = 786_432;

/// The maximum number of commands that are parsed before the first of these commands is run. The
/// store prefetches the keys of up to this number of commands. With this bound, a worker's argument
/// list stays below 512 KiB.
pub const MAX_TOGETHER: usize = tidegate_core::MemoryStore::PREFETCHED;

/// The size of the read buffer, in bytes.
pub const READ_BYTES: usize = 32_768;

/// If the pending output has at least this number of bytes, no more commands are read or run until
/// the output has been written. A response that begins below the maximum is written completely.
pub const OUTPUT_BYTES: usize = 65_536;

/// The maximum length in bytes of an incomplete command that is copied to the front of the next
/// read. A connection that holds at most `SMALL_BYTES + READ_BYTES` stays open even if its worker
/// exceeds [`MAX_HELD_BYTES`].
pub const SMALL_BYTES: usize = 4_096;

/// The maximum total memory in bytes for the connections of a worker: incomplete commands, open
/// transactions, pending decisions and unsent replies. If the total exceeds this maximum, and a
/// connection holds more than `SMALL_BYTES + READ_BYTES`, the connection is closed.
pub const MAX_HELD_BYTES: usize = 64 << 20;

/// The maximum length in bytes of a connection name, library name or library version.
pub const MAX_NAME_BYTES: usize = 256;

/// The maximum number of bytes that the server reads and discards after its last response. Unread
/// bytes could make the operating system reset the connection before the client has read the
/// response.
pub const LINGER_BYTES: usize = 1 << 20;

/// The maximum number of concurrent Redis decisions for one client. Further commands are read only
/// when the replies to the batch are complete. If a transaction needs more decisions, the excess
/// decisions wait.
pub const MAX_WAITING: usize = 1_024;
