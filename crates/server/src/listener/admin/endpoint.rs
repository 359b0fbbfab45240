//! The endpoints of the admin API, with their paths, methods and scopes.

use hyper::Method;
use tidegate_net::Problem;

/// The operation that a request calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operation {
    Liveness,
    Readiness,
    Metrics,
    ListEntryBlocks,
    ShowEntryBlock,
    PutEntryBlock,
    LiftEntryBlock,
    ListBlocks,
    ShowBlock,
    PutBlock,
    LiftBlock,
    ShowCandidate,
    PromoteCandidate,
    ListDenials,
    FollowEvents,
    Explain,
    ShowKeys,
    ResetKey,
    Reload,
    ListRules,
    PreviewRules,
    ShowStatus,
    ResetThrottle,
    ListOverrides,
    ShowOverride,
    SetOverride,
    RemoveOverride,
    ListTop,
    ShowTraffic,
    ShowHistory,
}

impl Operation {
    /// Returns whether the operation changes what the server enforces, so that it needs the scope
    /// `operate`.
    pub(super) const fn is_change(self) -> bool {
        matches!(
            self,
            Self::PutEntryBlock
                | Self::LiftEntryBlock
                | Self::PutBlock
                | Self::LiftBlock
                | Self::PromoteCandidate
                | Self::ResetKey
                | Self::Reload
                | Self::ResetThrottle
                | Self::SetOverride
                | Self::RemoveOverride
        )
    }
}

/// The kind of the variable path segments, which follow the fixed segments.
#[derive(Clone, Copy, Debug)]
enum Target {
    None,
    /// One segment, `{key}`.
    Key,
    /// A rule, followed by the values of a key: `{rule}/{key}`. The key can be empty.
    RuleAndKey,
    /// Pairs of an entry and its value: `{entry}/{value}`, `{entry}/{value}/{entry}/{value}`, …
    Entries,
}

/// A path with its allowed methods.
struct AdminEndpoint {
    /// The fixed segments at the start of the path.
    segments: &'static [&'static str],
    target: Target,
    operations: &'static [(&'static str, Operation)],
}

const fn endpoint(
    segments: &'static [&'static str],
    operations: &'static [(&'static str, Operation)],
) -> AdminEndpoint {
    AdminEndpoint {
        segments,
        target: Target::None,
        operations,
    }
}

const ENDPOINTS: &[AdminEndpoint] = &[
    endpoint(&["healthz"], &[("GET", Operation::Liveness)]),
    endpoint(&["readyz"], &[("GET", Operation::Readiness)]),
    endpoint(&["metrics"], &[("GET", Operation::Metrics)]),
    endpoint(&["v1", "blocks"], &[("GET", Operation::ListBlocks)]),
    AdminEndpoint {
        segments: &["v1", "blocks"],
        target: Target::RuleAndKey,
        operations: &[
            ("GET", Operation::ShowBlock),
            ("PUT", Operation::PutBlock),
            ("DELETE", Operation::LiftBlock),
        ],
    },
    endpoint(&["v1", "candidate"], &[("GET", Operation::ShowCandidate)]),
    endpoint(
        &["v1", "candidate", "promote"],
        &[("POST", Operation::PromoteCandidate)],
    ),
    endpoint(&["v1", "denials"], &[("GET", Operation::ListDenials)]),
    endpoint(
        &["v1", "entry-blocks"],
        &[("GET", Operation::ListEntryBlocks)],
    ),
    AdminEndpoint {
        segments: &["v1", "entry-blocks"],
        target: Target::Entries,
        operations: &[
            ("GET", Operation::ShowEntryBlock),
            ("PUT", Operation::PutEntryBlock),
            ("DELETE", Operation::LiftEntryBlock),
        ],
    },
    endpoint(&["v1", "events"], &[("GET", Operation::FollowEvents)]),
    endpoint(&["v1", "history"], &[("GET", Operation::ShowHistory)]),
    endpoint(&["v1", "explain"], &[("POST", Operation::Explain)]),
    AdminEndpoint {
        segments: &["v1", "keys"],
        target: Target::RuleAndKey,
        operations: &[
            ("GET", Operation::ShowKeys),
            ("DELETE", Operation::ResetKey),
        ],
    },
    endpoint(&["v1", "overrides"], &[("GET", Operation::ListOverrides)]),
    AdminEndpoint {
        segments: &["v1", "overrides"],
        target: Target::RuleAndKey,
        operations: &[
            ("GET", Operation::ShowOverride),
            ("PUT", Operation::SetOverride),
            ("DELETE", Operation::RemoveOverride),
        ],
    },
    endpoint(&["v1", "reload"], &[("POST", Operation::Reload)]),
    endpoint(&["v1", "rules"], &[("GET", Operation::ListRules)]),
    endpoint(
        &["v1", "rules", "preview"],
        &[("POST", Operation::PreviewRules)],
    ),
    endpoint(&["v1", "status"], &[("GET", Operation::ShowStatus)]),
    AdminEndpoint {
        segments: &["v1", "throttles"],
        target: Target::Key,
        operations: &[("DELETE", Operation::ResetThrottle)],
    },
    endpoint(&["v1", "top"], &[("GET", Operation::ListTop)]),
    endpoint(&["v1", "traffic"], &[("GET", Operation::ShowTraffic)]),
];

/// An operation, and the path segments that follow the fixed segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct EndpointMatch<'p> {
    pub(super) operation: Operation,
    pub(super) rest: &'p [&'p str],
}

/// Finds the operation of a request.
///
/// # Errors
///
/// Returns a problem that lists all paths if the path is unknown. If the path does not allow the
/// method, the problem lists the allowed methods.
pub(super) fn find<'p>(
    segments: &'p [&'p str],
    method: &Method,
) -> Result<EndpointMatch<'p>, Problem> {
    let found = ENDPOINTS.iter().find_map(|endpoint| {
        let rest = segments.strip_prefix(endpoint.segments)?;
        let is_target = match endpoint.target {
            Target::None => rest.is_empty(),
            Target::Key => rest.len() == 1,
            Target::RuleAndKey | Target::Entries => !rest.is_empty(),
        };
        is_target.then_some((endpoint, rest))
    });
    let Some((endpoint, rest)) = found else {
        return Err(Problem::not_found(&all_paths()));
    };
    let mut operations = endpoint.operations.iter();
    match operations.find(|(name, _)| *name == method.as_str()) {
        Some((_, operation)) => Ok(EndpointMatch {
            operation: *operation,
            rest,
        }),
        None => {
            let methods = endpoint.operations.iter().map(|(name, _)| *name);
            Err(Problem::method(methods.collect::<Vec<_>>().join(", ")))
        }
    }
}

/// Lists the paths of all endpoints.
fn all_paths() -> String {
    let paths = ENDPOINTS.iter().map(|endpoint| {
        let target = match endpoint.target {
            Target::None => "",
            Target::Key => "/{key}",
            Target::RuleAndKey => "/{rule}/{key}",
            Target::Entries => "/{entry}/{value}",
        };
        format!(", /{}{target}", endpoint.segments.join("/"))
    });
    format!("/{}", paths.collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(path: &[&str], method: &Method) -> u16 {
        find(path, method).map_or_else(|problem| problem.answer().status().as_u16(), |_| 200)
    }

    #[test]
    fn paths_and_methods_select_the_operation() {
        let operation = |path: &[&str], method| find(path, &method).unwrap().operation;
        assert_eq!(
            operation(&["v1", "blocks"], Method::GET),
            Operation::ListBlocks
        );
        let path = ["v1", "blocks", "rule", "a", "b"];
        let matched = find(&path, &Method::PUT).unwrap();
        assert_eq!(matched.operation, Operation::PutBlock);
        assert_eq!(matched.rest, ["rule", "a", "b"]);
        assert_eq!(
            operation(&["v1", "rules", "preview"], Method::POST),
            Operation::PreviewRules
        );
        assert_eq!(
            operation(&["v1", "keys", "r"], Method::GET),
            Operation::ShowKeys
        );
        assert_eq!(status(&["v1", "blocks"], &Method::PUT), 405);
        assert_eq!(status(&["v1", "throttles", "a", "b"], &Method::DELETE), 404);
        assert_eq!(status(&["v1"], &Method::GET), 404);
        assert_eq!(status(&[""], &Method::GET), 404);
    }

    #[test]
    fn a_change_is_never_a_get() {
        for (name, operation) in ENDPOINTS.iter().flat_map(|endpoint| endpoint.operations) {
            assert!(!(operation.is_change() && *name == "GET"), "{operation:?}");
            // Explanations and previews need a body, so they use `POST`, but they change nothing.
            let is_query = matches!(operation, Operation::Explain | Operation::PreviewRules);
            assert_eq!(
                operation.is_change(),
                *name != "GET" && !is_query,
                "{operation:?}"
            );
        }
    }
}
