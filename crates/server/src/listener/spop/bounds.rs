//! Bounds on the memory that one HAProxy instance can make the listener use.

/// The maximum frame length in bytes, without the length prefix. HAProxy offers its buffer size
/// (`tune.bufsize`) minus 4, which is 16,380 by default.
pub const MAX_FRAME_BYTES: usize = 65_532;

/// The smallest maximum frame length that HAProxy may offer, in bytes. The SPOP specification
/// defines the lower bound.
pub const MIN_FRAME_BYTES: usize = 256;

/// The maximum number of frames that are decided concurrently for one connection. Further frames
/// are decided only after all of these frames have been answered.
pub const MAX_TOGETHER: usize = 64;

/// If the pending output has at least this number of bytes, no more frames are decided until the
/// output has been written. The responses to [`MAX_TOGETHER`] frames may exceed this size.
pub const OUTPUT_BYTES: usize = 65_536;

/// The size of a worker's read buffer, in bytes.
pub const READ_BYTES: usize = 32_768;

/// A connection whose buffer has at most this number of bytes stays open even if its worker exceeds
/// [`MAX_HELD_BYTES`].
pub const SMALL_BYTES: usize = 4_096;

/// The maximum total memory in bytes for incomplete frames, over all connections of a worker. If a
/// connection needs more than [`SMALL_BYTES`] and the total exceeds this maximum, the connection is
/// closed.
pub const MAX_HELD_BYTES: usize = 64 << 20;
