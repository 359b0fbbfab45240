//! A script and what it is called with.

use std::{fmt, sync::Arc};

use tidegate_core::Effect;

/// A script and its digest, by which the server knows it once it has seen the text.
pub(crate) struct Script {
    pub(crate) text: String,
    /// SHA-1 of the text, in 40 hexadecimal digits.
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

/// What is done with an answer that nobody waits for any more.
#[derive(Clone)]
pub(crate) struct Unheard(pub(crate) Arc<dyn Fn(Reply) + Send + Sync>);

impl fmt::Debug for Unheard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Unheard")
    }
}

/// One call of a script. All its keys are in one slot, so that it can be made on any topology.
#[derive(Debug)]
pub(crate) struct Call {
    pub(crate) script: &'static Script,
    pub(crate) keys: Vec<Vec<u8>>,
    pub(crate) args: Vec<Vec<u8>>,
    pub(crate) unheard: Option<Unheard>,
}

impl Call {
    /// The same call for each key alone, of a script whose arguments are `shared` ones and then three for each key.
    pub(crate) fn each(&self, shared: usize) -> Vec<Self> {
        let (shared, of_keys) = self.args.split_at(shared.min(self.args.len()));
        let keys = self.keys.iter().zip(of_keys.chunks(3));
        keys.map(|(key, args)| Self {
            script: self.script,
            keys: vec![key.clone()],
            args: [shared, args].concat(),
            unheard: None,
        })
        .collect()
    }
}

/// What a script answered.
pub(crate) type Reply = redis::Value;

/// What the script `check` is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Intent {
    /// Charge what is admitted.
    Charge,
    /// The same, with receipts to give it back by.
    Reserve,
    /// Charge nothing, and answer what is to be charged next.
    Foresee,
    /// Charge what counts denied requests: others have denied it.
    Deny,
    /// Charge nothing, and answer what a charge would be answered.
    Peek,
    /// Charge nothing, and answer how the limits stand.
    Look,
}

impl Intent {
    pub(crate) fn of(effect: Effect) -> Self {
        match effect {
            Effect::Charge => Self::Charge,
            Effect::Peek => Self::Peek,
            Effect::Look | Effect::Refund => Self::Look,
        }
    }

    /// Whether states that were left in other terms are converted before they are charged, and not only read as if they were.
    pub(crate) fn converts(self) -> bool {
        matches!(self, Self::Charge | Self::Reserve | Self::Deny)
    }

    /// What the script calls it.
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Charge => "charge",
            Self::Reserve => "reserve",
            Self::Deny => "deny",
            Self::Foresee | Self::Peek => "peek",
            Self::Look => "look",
        }
    }
}
