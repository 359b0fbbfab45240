//! Bodies that can be sent, or looked at, more than once.

mod peeked;
mod replay;

pub use peeked::PeekedBody;
pub use replay::ReplayBody;
