//! Script calls: a script, its keys and its arguments.

use std::{fmt, sync::Arc};

use redis::Cmd;
use tidegate_core::Effect;

/// A Lua script and its digest. Once the source has been sent to the server, the digest identifies
/// the script.
pub(crate) struct Script {
    pub(crate) text: String,
    /// SHA-1 of the source, as 40 hexadecimal digits.
    pub(crate) sha: String,
}

impl Script {
    pub(crate) fn new(text: String) -> Self {
        let sha = redis::Script::new(&text).get_hash().to_owned();
        Self { text, sha }
    }
}

impl fmt::Debug for Script {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Script({})", self.sha)
    }
}

/// A callback for a reply that arrives after the caller has stopped waiting. The callback also gets
/// the command that was sent.
#[derive(Clone)]
pub(crate) struct OnLateReply(pub(crate) Arc<LateReplyFn>);

type LateReplyFn = dyn Fn(&Cmd, Reply) + Send + Sync;

impl fmt::Debug for OnLateReply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OnLateReply")
    }
}

/// A call to a script. All keys of a call are in one hash slot, so that the call works on every
/// topology.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub(crate) script: &'static Script,
    pub(crate) keys: Vec<Vec<u8>>,
    pub(crate) args: Vec<Vec<u8>>,
    pub(crate) on_late_reply: Option<OnLateReply>,
}

impl Call {
    /// Splits the call into one call per key. The first `shared` arguments are common to all keys.
    /// Three arguments for each key follow.
    pub(crate) fn split_by_key(&self, shared: usize) -> Vec<Self> {
        let (shared, of_keys) = self.args.split_at(shared.min(self.args.len()));
        let keys = self.keys.iter().zip(of_keys.chunks(3));
        keys.map(|(key, args)| Self {
            script: self.script,
            keys: vec![key.clone()],
            args: [shared, args].concat(),
            on_late_reply: None,
        })
        .collect()
    }
}

/// The reply of a script.
pub(crate) type Reply = redis::Value;

/// The operation that a call to the script `check` performs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Intent {
    /// Charge the limits if the request is admitted.
    Charge,
    /// Charge the limits if the request is admitted, and return receipts for a later refund.
    Reserve,
    /// Charge nothing, and return whether the limits would admit the charge.
    Precheck,
    /// Charge only the limits that count denied requests, because another hash slot has denied
    /// the request.
    Deny,
    /// Charge nothing, and return the decision that a charge would lead to.
    Peek,
    /// Charge nothing, and report the current state of the limits.
    Look,
}

impl Intent {
    pub(crate) fn from_effect(effect: Effect) -> Self {
        match effect {
            Effect::Charge => Self::Charge,
            Effect::Peek => Self::Peek,
            Effect::Look | Effect::Refund => Self::Look,
        }
    }

    /// Returns whether the script may store a state that the client has converted to new limit
    /// parameters. If not, the script uses the converted state only for the reply.
    pub(crate) fn can_store_conversion(self) -> bool {
        matches!(self, Self::Charge | Self::Reserve | Self::Deny)
    }

    /// Returns the operation's name in the script.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Charge => "charge",
            Self::Reserve => "reserve",
            Self::Deny => "deny",
            Self::Precheck | Self::Peek => "peek",
            Self::Look => "look",
        }
    }
}
