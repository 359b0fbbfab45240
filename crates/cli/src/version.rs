//! The program version, with the build's commit and features.

/// The source commit that `build.rs` found, if any.
const COMMIT: Option<&str> = option_env!("TIDEGATE_BUILD_COMMIT");

/// The Cargo features of this build, in alphabetical order.
const FEATURES: &[&str] = &[
    #[cfg(feature = "telemetry")]
    "telemetry",
];

/// Returns the version, such as `0.1.0 (commit 0123456789ab, features: telemetry)`.
pub(crate) fn version() -> String {
    let commit = COMMIT.map_or_else(
        || "commit unknown".to_owned(),
        |commit| format!("commit {commit}"),
    );
    let features = if FEATURES.is_empty() {
        "none".to_owned()
    } else {
        FEATURES.join(", ")
    };
    format!(
        "{} ({commit}, features: {features})",
        env!("CARGO_PKG_VERSION")
    )
}
