//! Evaluation checks a rule's limits for a key, and charges them. All stores use the code in this
//! module.

mod block_end;
mod charge;
mod decision;
mod evaluate;
mod fallback;
mod key_state;
mod limit_group;
mod limits;
mod receipt;
pub mod remote_eval;
mod verdict;

pub use self::{
    block_end::BlockEnd,
    charge::{Charge, Cost, Effect, RequestError, has_repeated_key},
    decision::Decision,
    fallback::{FallbackShare, OnFailure},
    limit_group::DenialCounting,
    limits::{DrainTimes, Limits},
    receipt::{Receipt, Refund, Renewal, Settlement},
    verdict::{Exactness, Line, Lines, Reason, Source, Verdict},
};
pub(crate) use self::{
    evaluate::Evaluation,
    key_state::KeyState,
    limit_group::{EvaluationResult, LimitGroup, Mask},
    limits::{FormerState, LoadedState, UndoRecord},
    receipt::{ChargeRecord, ChargeRecords, Marks},
};
