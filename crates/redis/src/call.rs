//! A script and what it is called with.

use std::fmt;

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

/// One call of a script. All its keys are in one slot, so that it can be made on any topology.
#[derive(Debug)]
pub(crate) struct Call {
    pub(crate) script: &'static Script,
    pub(crate) keys: Vec<Vec<u8>>,
    pub(crate) args: Vec<Vec<u8>>,
}

/// What a script answered.
pub(crate) type Reply = redis::Value;
