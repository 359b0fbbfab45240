//! Bounds on the memory that one HAProxy can make this listener use.

/// The maximum length of a frame in bytes, without its length prefix. HAProxy offers the size of
/// its buffers (`tune.bufsize`) minus 4, which is 16,380 by default.
pub const MAX_FRAME_BYTES: usize = 65_532;

/// The minimum of the maximum length of a frame, as the protocol requires.
pub const MIN_FRAME_BYTES: usize = 256;

/// The maximum number of frames that are decided at the same time for one connection. Further
/// frames are read only when these are answered.
pub const MAX_TOGETHER: usize = 64;

/// The output size in bytes above which no more frames are decided until HAProxy has read the
/// output. The responses to [`MAX_TOGETHER`] frames may exceed it.
pub const OUTPUT_BYTES: usize = 65_536;

/// The size of the read buffer of a worker, in bytes.
pub const READ_BYTES: usize = 32_768;

/// The length in bytes up to which an incomplete frame is kept even if the worker has reached
/// [`MAX_HELD_BYTES`].
pub const SMALL_BYTES: usize = 4_096;

/// The maximum memory in bytes that the incomplete frames of all connections of a worker may hold.
/// A connection that would exceed this maximum is closed.
pub const MAX_HELD_BYTES: usize = 64 << 20;
