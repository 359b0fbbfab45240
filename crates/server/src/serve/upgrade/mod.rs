//! Upgrades without a gap: a new process takes over the listening sockets, the state and the open
//! connections of the old process.
//!
//! `channel` transports the messages between the two processes, `sender` is the side of the old
//! process, and `receiver` the side of the new one. The decision record 0024 explains the design.

mod channel;
mod connection_body;
mod receiver;
mod sender;

pub use self::{
    channel::ChannelError,
    receiver::{Takeover, TakeoverError, TakeoverReporter},
    sender::Program,
};
pub(super) use self::{
    receiver::PassedListener,
    sender::{OwnListener, Upgrade, UpgradeReport},
};
