//! Lints: warnings about valid settings that probably do not have the effect that their author
//! intended.

pub(super) mod bypass;
pub(super) mod dead_conditions;
pub(super) mod exact_path;
pub(super) mod implied_limit;
mod misread;
pub(super) mod no_burst;
pub(super) mod plan_choice;
pub(super) mod proxy;
