//! Bodies that can be sent, or read, more than once.

mod peeked;
mod replay;

pub use peeked::PeekedBody;
pub use replay::ReplayBody;
