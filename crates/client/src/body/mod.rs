//! Bodies that can be sent more than once or read more than once.

mod peeked;
mod replay;

pub use peeked::PeekedBody;
pub use replay::ReplayBody;
