//! The operator commands, which send requests to a running server's admin endpoint.

use std::{io::IsTerminal as _, path::Path, process::ExitCode, time::Duration};

use http::{HeaderValue, Method};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::{Value, json};
use tidegate_core::top::Period;

use crate::{
    admin_address::{AdminAddress, Scheme},
    args::{
        Admin, BlockOptions, BlocksOptions, CandidateAction, DenialsOptions, EventsOptions,
        ExplainOptions, KeyOrEntries, KeyOrThrottle, KeysOptions, OverrideOptions,
        OverridesOptions, RuleKey, TopOptions,
    },
    output::{NO, eprint_message, is_output_closed, print_result},
    print, tls,
    unreachable::{TIMEOUT, describe, unreachable},
};

/// The interval at which `top --watch` updates its list.
const WATCH_INTERVAL: Duration = Duration::from_secs(2);

/// The value of `--over` that selects the lists of all periods.
const EVERY_PERIOD: &str = "all";

/// The interval at which `events --follow` requests further events.
const FOLLOW_INTERVAL: Duration = Duration::from_secs(1);

/// The maximum time between two reconnection attempts of `events --follow`.
const MAX_RECONNECT_DELAY: Duration = Duration::from_secs(30);

/// The terminal control sequences that clear the screen and move the cursor to the top left corner.
const CLEAR: &str = "\x1b[2J\x1b[3J\x1b[H";

/// The maximum size of a response in bytes. Without a maximum, a response from a server at a wrong
/// address could exhaust the memory. For comparison, a list of 100,000 blocks, which is the maximum
/// number of blocks, takes about 20 MB.
const MAX_RESPONSE_BYTES: u64 = 1 << 30;

/// The maximum number of keys that the server returns in one response.
const MAX_KEYS_PER_PAGE: usize = 1_000;

/// The maximum number of blocks by entries that the server returns in one response.
const MAX_BLOCKS_PER_PAGE: usize = 1_000;

/// A request to the admin endpoint.
struct AdminRequest<'a> {
    admin: &'a Admin,
    /// What the command does, as a phrase for messages, such as "list the rules".
    task: String,
    method: Method,
    path: String,
    body: Option<String>,
}

/// The server's response.
enum AdminResponse {
    /// Success, with the JSON document from the response.
    Document(Value),
    /// Failure, with one message per line: for example, a key was not found, or a file has errors.
    Problems(Vec<String>),
}

pub(crate) fn status(admin: &Admin) -> Result<ExitCode, String> {
    let status = get(admin, "show the status", "/v1/status").send()?;
    let is_ready = match &status {
        AdminResponse::Document(status) => status["ready"] == true,
        AdminResponse::Problems(_) => false,
    };
    let shown = show(admin, status, print::status);
    Ok(if is_ready { shown } else { ExitCode::from(NO) })
}

/// Reports whether the server is ready. No token is needed, because the metrics listener and an
/// admin listener on loopback accept probes without a token.
pub(crate) fn health(admin: &Admin) -> Result<ExitCode, String> {
    let health = get(admin, "check the health", "/readyz").send()?;
    let is_ready = match &health {
        AdminResponse::Document(health) => health["ready"] == true,
        AdminResponse::Problems(_) => false,
    };
    let shown = show(admin, health, print::health);
    Ok(if is_ready { shown } else { ExitCode::from(NO) })
}

pub(crate) fn rules(admin: &Admin) -> Result<ExitCode, String> {
    let rules = get(admin, "list the rules", "/v1/rules").send()?;
    Ok(show(admin, rules, print::rules))
}

pub(crate) fn preview(admin: &Admin, file: &Path) -> Result<ExitCode, String> {
    let shown = print::printable(&file.display().to_string());
    let text =
        std::fs::read_to_string(file).map_err(|error| format!("cannot read {shown}: {error}"))?;
    let request = AdminRequest {
        method: Method::POST,
        body: Some(text),
        ..get(admin, &format!("preview {shown}"), "/v1/rules/preview")
    };
    Ok(show(admin, request.send()?, print::rules_preview))
}

pub(crate) fn reload(admin: &Admin) -> Result<ExitCode, String> {
    let request = AdminRequest {
        method: Method::POST,
        ..get(admin, "reload the rules file", "/v1/reload")
    };
    Ok(show(admin, request.send()?, print::reloaded))
}

pub(crate) fn block(
    admin: &Admin,
    target: KeyOrEntries,
    options: BlockOptions,
) -> Result<ExitCode, String> {
    let mut body = serde_json::Map::new();
    let texts = [
        ("for", options.span),
        ("until", options.until),
        ("reason", options.reason),
    ];
    for (name, text) in texts {
        body.extend(text.map(|text| (name.to_owned(), json!(text))));
    }
    let flags = [
        ("raw", options.raw),
        ("shorten", options.shorten),
        ("wide", options.wide),
    ];
    for (name, is_set) in flags {
        body.extend(is_set.then(|| (name.to_owned(), json!(true))));
    }
    let request = AdminRequest {
        method: Method::PUT,
        body: Some(Value::Object(body).to_string()),
        ..of_key_or_entries(admin, "block", target)
    };
    Ok(show(admin, request.send()?, print::blocked))
}

pub(crate) fn unblock(admin: &Admin, target: KeyOrEntries) -> Result<ExitCode, String> {
    let request = AdminRequest {
        method: Method::DELETE,
        ..of_key_or_entries(admin, "unblock", target)
    };
    let lifted = request.send()?;
    Ok(show(admin, lifted, |done| print::done("unblocked", done)))
}

pub(crate) fn blocks(admin: &Admin, options: &BlocksOptions) -> Result<ExitCode, String> {
    let blocks = list_blocks(admin, options.search.as_deref(), usize::MAX)?;
    Ok(show(admin, blocks, print::blocks))
}

/// Returns a document with up to `most` blocks of keys and up to `most` blocks by entries. With
/// `search`, the document contains only the blocks with this string in a value or in the reason;
/// the number of such blocks of keys is then not limited.
fn list_blocks(admin: &Admin, search: Option<&str>, most: usize) -> Result<AdminResponse, String> {
    let count = (search.is_none() && most < usize::MAX).then(|| most.to_string());
    let count = count.iter().map(|count| ("n", count));
    let path = with_query("/v1/blocks", count);
    let mut document = match get(admin, "list the blocks", &path).send()? {
        AdminResponse::Document(document) => document,
        problems @ AdminResponse::Problems(_) => return Ok(problems),
    };
    if let (Some(search), Some(blocks)) = (search, document["blocks"].as_array_mut()) {
        let has = |value: &Value| value.as_str().is_some_and(|text| text.contains(search));
        blocks.retain(|block| {
            has(&block["reason"])
                || block["key"]
                    .as_array()
                    .is_some_and(|key| key.iter().any(has))
        });
    }
    let listed = document["blocks"].as_array().map_or(0, Vec::len);
    let has_more = search.is_none() && document["count"].as_u64() > u64::try_from(listed).ok();
    document["has_more_blocks"] = has_more.into();
    let (mut by_entries, mut after) = (Vec::new(), None::<String>);
    let search = search.map(str::to_owned);
    loop {
        let left = most.saturating_sub(by_entries.len());
        let count = left.min(MAX_BLOCKS_PER_PAGE).to_string();
        let optional = [("search", &search), ("after", &after)];
        let optional = optional
            .into_iter()
            .filter_map(|(name, value)| Some((name, value.as_ref()?)));
        let path = with_query("/v1/entry-blocks", optional.chain([("n", &count)]));
        match get(admin, "list the blocks by entries", &path).send()? {
            AdminResponse::Document(mut page) => {
                let blocks = page["blocks"].as_array_mut().map(std::mem::take);
                by_entries.extend(blocks.into_iter().flatten());
                after = page["next"].as_str().map(str::to_owned);
            }
            problems @ AdminResponse::Problems(_) => return Ok(problems),
        }
        if after.is_none() || by_entries.len() >= most {
            document["entry_blocks"] = Value::Array(by_entries);
            document["has_more_entry_blocks"] = after.is_some().into();
            return Ok(AdminResponse::Document(document));
        }
    }
}

/// Sets or removes the override of a key.
pub(crate) fn set_override(
    admin: &Admin,
    key: &RuleKey,
    options: OverrideOptions,
) -> Result<ExitCode, String> {
    let request = of_key(admin, "override", "overrides", key);
    if options.remove {
        let request = AdminRequest {
            method: Method::DELETE,
            ..request
        };
        let removed = request.send()?;
        return Ok(show(admin, removed, |done| {
            print::done("removed the override of", done)
        }));
    }
    let mut body = serde_json::Map::new();
    if !options.limits.is_empty() {
        body.insert("limits".to_owned(), json!(options.limits));
    }
    let texts = [
        ("plan", options.plan),
        ("for", options.span),
        ("until", options.until),
        ("reason", options.reason),
    ];
    for (name, text) in texts {
        body.extend(text.map(|text| (name.to_owned(), json!(text))));
    }
    body.extend(options.raw.then(|| ("raw".to_owned(), json!(true))));
    let request = AdminRequest {
        method: Method::PUT,
        body: Some(Value::Object(body).to_string()),
        ..request
    };
    Ok(show(admin, request.send()?, print::overridden))
}

pub(crate) fn overrides(admin: &Admin, options: &OverridesOptions) -> Result<ExitCode, String> {
    let OverridesOptions {
        rule,
        search,
        count,
        after,
    } = options;
    let parameters = [("rule", rule), ("search", search), ("after", after)];
    let parameters = parameters
        .into_iter()
        .filter_map(|(name, value)| Some((name, value.as_ref()?)))
        .chain([("n", count)]);
    let path = with_query("/v1/overrides", parameters);
    let overrides = get(admin, "list the overrides", &path).send()?;
    Ok(show(admin, overrides, print::overrides))
}

pub(crate) fn inspect(admin: &Admin, key: &RuleKey) -> Result<ExitCode, String> {
    let inspected = of_key(admin, "inspect", "keys", key).send()?;
    Ok(show(admin, inspected, print::inspected))
}

pub(crate) fn reset(admin: &Admin, key: &KeyOrThrottle) -> Result<ExitCode, String> {
    let request = match (&key.throttle, &key.rule) {
        (Some(throttle), _) => {
            let path = format!("/v1/throttles/{}", encoded(throttle));
            get(admin, &format!("reset {throttle}"), &path)
        }
        (None, rule) => {
            let (rule, values) = (rule.clone().unwrap_or_default(), key.values.clone());
            of_key(admin, "reset", "keys", &RuleKey { rule, values })
        }
    };
    let request = AdminRequest {
        method: Method::DELETE,
        ..request
    };
    let reset = request.send()?;
    Ok(show(admin, reset, |done| print::done("reset", done)))
}

pub(crate) fn top(admin: &Admin, options: &TopOptions) -> Result<ExitCode, String> {
    let TopOptions {
        rule,
        by,
        over,
        count,
        watch,
    } = options;
    let rule = rule.iter().map(|rule| format!("&rule={}", encoded(rule)));
    let rule: String = rule.collect();
    let list = |over: &str| {
        let (by, over, count) = (encoded(by), encoded(over), encoded(count));
        let path = format!("/v1/top?by={by}&over={over}&n={count}{rule}");
        get(admin, "list the top talkers", &path).send()
    };
    let is_overview = over == EVERY_PERIOD;
    if !is_overview && Period::parse(over).is_none() {
        let periods = Period::ALL.map(Period::as_str).join(", ");
        let over = print::printable(over);
        return Err(format!(
            "--over: must be {periods} or {EVERY_PERIOD}, got `{over}`"
        ));
    }
    loop {
        let list = if is_overview {
            overview(admin, list, count.parse().unwrap_or(usize::MAX))?
        } else {
            list(over)?
        };
        let is_problem = matches!(list, AdminResponse::Problems(_));
        if *watch && !is_problem && std::io::stdout().is_terminal() {
            print_result(CLEAR);
        }
        let shown = show(admin, list, |list| {
            if is_overview {
                print::overview(list)
            } else {
                print::top(list)
            }
        });
        if !watch || is_problem || is_output_closed() {
            return Ok(shown);
        }
        pause(WATCH_INTERVAL);
    }
}

/// Returns the top talkers of every period, and the blocks. Requests at most `most` blocks of keys
/// and `most` blocks by entries, because `--watch` repeats the request every two seconds.
fn overview(
    admin: &Admin,
    list: impl Fn(&str) -> Result<AdminResponse, String>,
    most: usize,
) -> Result<AdminResponse, String> {
    let mut periods = Vec::with_capacity(Period::ALL.len());
    for over in Period::ALL {
        match list(over.as_str())? {
            AdminResponse::Document(list) => periods.push(list),
            problems @ AdminResponse::Problems(_) => return Ok(problems),
        }
    }
    // While Redis is unreachable, the blocks cannot be listed, but this server's top talkers are
    // still useful.
    let (mut document, problem) = match list_blocks(admin, None, most) {
        Ok(AdminResponse::Document(blocks)) => (blocks, None),
        Ok(AdminResponse::Problems(problems)) => {
            (json!({"blocks": null}), Some(problems.join("; ")))
        }
        Err(problem) => (json!({"blocks": null}), Some(problem)),
    };
    document["periods"] = json!(periods);
    if let Some(problem) = problem {
        document["hint"] = json!(problem);
    }
    Ok(AdminResponse::Document(document))
}

pub(crate) fn candidate(
    admin: &Admin,
    action: CandidateAction,
    count: &str,
) -> Result<ExitCode, String> {
    match action {
        CandidateAction::Show => {
            let path = format!("/v1/candidate?n={}", encoded(count));
            let compared = get(admin, "show the candidate rules", &path).send()?;
            Ok(show(admin, compared, print::candidate))
        }
        CandidateAction::Promote => {
            let request = AdminRequest {
                method: Method::POST,
                ..get(
                    admin,
                    "promote the candidate rules",
                    "/v1/candidate/promote",
                )
            };
            Ok(show(admin, request.send()?, print::promoted))
        }
    }
}

/// Waits between two requests of `top --watch` or `events --follow`.
#[expect(
    clippy::disallowed_methods,
    reason = "the command has no other work while it waits"
)]
fn pause(time: Duration) {
    std::thread::sleep(time);
}

pub(crate) fn denials(admin: &Admin, options: &DenialsOptions) -> Result<ExitCode, String> {
    let DenialsOptions {
        rule,
        key,
        since,
        count,
    } = options;
    let rule = rule.iter().map(|rule| ("rule", rule));
    let key = key.iter().map(|value| ("key", value));
    let since = since.iter().map(|since| ("since", since));
    let count = std::iter::once(("n", count));
    let path = with_query("/v1/denials", rule.chain(key).chain(since).chain(count));
    let denials = get(admin, "list the denials", &path).send()?;
    Ok(show(admin, denials, print::denials))
}

pub(crate) fn events(admin: &Admin, options: &EventsOptions) -> Result<ExitCode, String> {
    let path = format!("/v1/events?n={}", encoded(&options.count));
    let mut listed = get(admin, "list the events", &path).send()?;
    let mut last = None;
    let mut is_first = true;
    loop {
        let newest = match &listed {
            AdminResponse::Document(document) => newest_id(document),
            AdminResponse::Problems(_) => return Ok(show(admin, listed, print::events)),
        };
        if is_first || newest.is_some() {
            let shown = show(admin, listed, print::events);
            if !options.follow || is_output_closed() {
                return Ok(shown);
            }
        }
        last = newest.or(last);
        is_first = false;
        pause(FOLLOW_INTERVAL);
        listed = further_events(admin, last.as_deref());
    }
}

/// Returns the ID of the newest event in a list.
fn newest_id(list: &Value) -> Option<String> {
    let newest = list["events"].as_array()?.last()?;
    newest["id"].as_str().map(str::to_owned)
}

/// Returns the events after the event with the ID `last`. If the server does not respond, for
/// example because it is restarting, repeats the request with exponential backoff. A restarted
/// server does not recognise the ID, and returns all its events.
fn further_events(admin: &Admin, last: Option<&str>) -> AdminResponse {
    let after = last.map(|last| format!("&after={}", encoded(last)));
    let path = format!("/v1/events?n=1024{}", after.unwrap_or_default());
    let mut delay = FOLLOW_INTERVAL;
    let mut reported = None;
    loop {
        match get(admin, "list the events", &path).send() {
            Ok(listed) => {
                if reported.is_some() {
                    eprint_message("the server responds again");
                }
                return listed;
            }
            Err(problem) => {
                if reported.as_ref() != Some(&problem) {
                    eprint_message(&format!(
                        "{problem}; trying again until the server responds"
                    ));
                    reported = Some(problem);
                }
            }
        }
        pause(delay);
        delay = (delay * 2).min(MAX_RECONNECT_DELAY);
    }
}

pub(crate) fn explain(admin: &Admin, options: &ExplainOptions) -> Result<ExitCode, String> {
    let ExplainOptions {
        entries,
        cost,
        rule,
        raw,
    } = options;
    let mut named = serde_json::Map::new();
    for (name, value) in entries {
        if named.insert(name.clone(), json!(value)).is_some() {
            let name = print::printable(name);
            return Err(format!("the entry {name} is given twice; give it once"));
        }
    }
    let mut body = json!({"entries": named});
    if let Some(cost) = cost {
        body["cost"] = json!(cost);
    }
    if *raw {
        body["raw"] = json!(true);
    }
    let rule = rule.iter().map(|rule| ("rule", rule));
    let request = AdminRequest {
        method: Method::POST,
        body: Some(body.to_string()),
        ..get(
            admin,
            "explain the request",
            &with_query("/v1/explain", rule),
        )
    };
    Ok(show(admin, request.send()?, print::explained))
}

/// Lists keys page by page until the requested number of keys is reached. A page may be empty.
pub(crate) fn keys(admin: &Admin, options: &KeysOptions) -> Result<ExitCode, String> {
    let path = format!("/v1/keys/{}", encoded(&options.rule));
    let (mut keys, mut after) = (Vec::new(), options.after.clone());
    loop {
        let left = options
            .count
            .saturating_sub(keys.len())
            .min(MAX_KEYS_PER_PAGE);
        let count = left.to_string();
        let position = after.iter().map(|after| ("after", after));
        let path = with_query(&path, position.chain([("n", &count)]));
        let task = format!("list the keys of {}", print::printable(&options.rule));
        let mut page = match get(admin, &task, &path).send()? {
            AdminResponse::Document(page) => page,
            problems @ AdminResponse::Problems(_) => return Ok(show(admin, problems, print::keys)),
        };
        if let Value::Array(rows) = page["keys"].take() {
            keys.extend(rows);
        }
        after = page["next"].as_str().map(str::to_owned);
        if after.is_none() || keys.len() >= options.count {
            page["keys"] = Value::Array(keys);
            return Ok(show(admin, AdminResponse::Document(page), print::keys));
        }
    }
}

/// Appends query parameters to a path.
fn with_query<'v>(path: &str, parameters: impl Iterator<Item = (&'v str, &'v String)>) -> String {
    let mut path = path.to_owned();
    for (at, (name, value)) in parameters.enumerate() {
        path.push(if at == 0 { '?' } else { '&' });
        path.push_str(&format!("{name}={}", encoded(value)));
    }
    path
}

fn get<'a>(admin: &'a Admin, task: &str, path: &str) -> AdminRequest<'a> {
    AdminRequest {
        admin,
        task: task.to_owned(),
        method: Method::GET,
        path: path.to_owned(),
        body: None,
    }
}

/// Builds a request about the block of a key or of entries.
fn of_key_or_entries<'a>(admin: &'a Admin, verb: &str, target: KeyOrEntries) -> AdminRequest<'a> {
    let KeyOrEntries {
        name,
        values,
        entries,
        rule,
    } = target;
    if entries.is_empty() {
        let rule = name.unwrap_or_default();
        return of_key(admin, verb, "blocks", &RuleKey { rule, values });
    }
    let pairs = entries.iter();
    let segments: String = pairs
        .map(|(name, value)| format!("/{}/{}", encoded(name), encoded(value)))
        .collect();
    let query = rule.iter().map(|rule| ("rule", rule));
    let path = with_query(&format!("/v1/entry-blocks{segments}"), query);
    let pairs: Vec<String> = entries
        .iter()
        .map(|(name, value)| format!("{name}={value}"))
        .collect();
    let task = format!("{verb} {}", pairs.join(" "));
    get(admin, &print::printable(&task), &path)
}

/// Builds a request about one key of a rule. The request's path starts with `/v1/{what}/`.
fn of_key<'a>(admin: &'a Admin, verb: &str, what: &str, key: &RuleKey) -> AdminRequest<'a> {
    let values = key.values.iter();
    let segments: String = values.map(|value| format!("/{}", encoded(value))).collect();
    let path = format!("/v1/{what}/{}{segments}", encoded(&key.rule));
    let task = match key.values.as_slice() {
        [] => format!("{verb} {}", key.rule),
        values => format!("{verb} {} {}", key.rule, values.join(", ")),
    };
    get(admin, &print::printable(&task), &path)
}

fn encoded(text: &str) -> String {
    utf8_percent_encode(text, NON_ALPHANUMERIC).to_string()
}

/// Prints the response: as JSON with `--json`, and otherwise as formatted by `print`.
fn show(admin: &Admin, response: AdminResponse, print: impl FnOnce(&Value) -> String) -> ExitCode {
    match response {
        AdminResponse::Document(document) if admin.json => {
            // Serialising to a string fails only for a map with a key that is not a string.
            print_result(&serde_json::to_string_pretty(&document).unwrap_or_default());
            ExitCode::SUCCESS
        }
        AdminResponse::Document(document) => {
            print_result(&print(&document));
            ExitCode::SUCCESS
        }
        AdminResponse::Problems(problems) => {
            problems.iter().for_each(|problem| eprint_message(problem));
            ExitCode::from(NO)
        }
    }
}

impl AdminRequest<'_> {
    /// Sends the request. The error message contains the task, the problem and a suggested fix.
    fn send(self) -> Result<AdminResponse, String> {
        let task = self.task.clone();
        self.exchange()
            .map_err(|problem| format!("cannot {task}: {problem}"))
    }

    fn exchange(self) -> Result<AdminResponse, String> {
        let admin = self.admin;
        let address = AdminAddress::parse(&admin.address)?;
        let tls = tls::config(admin)?;
        match address.scheme {
            Some(Scheme::Https) if tls.is_none() => {
                return Err(format!(
                    "https://{address} needs the CA certificate of the server; pass the CA certificate with --admin-ca \
                     or TIDEGATE_ADMIN_CA"
                ));
            }
            Some(Scheme::Http) if tls.is_some() => {
                return Err(format!(
                    "http://{address} does not use TLS, but --admin-ca or TIDEGATE_ADMIN_CA requires TLS; write \
                     https://, or remove the CA certificate"
                ));
            }
            _ => {}
        }
        let is_tls = tls.is_some();
        let scheme = if is_tls { "https" } else { "http" };
        let url = format!("{scheme}://{address}{}", self.path);
        let agent: ureq::Agent = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .timeout_global(Some(TIMEOUT))
            .tls_config(tls.unwrap_or_default())
            // By default, the agent uses the proxy in `http_proxy` and similar variables. A proxy
            // would receive the admin token, and cannot reach a server on the loopback interface.
            .proxy(None)
            .build()
            .into();
        let mut request = http::Request::builder().method(self.method).uri(&url);
        if let Some(token) = admin.token() {
            let Ok(token) = HeaderValue::from_str(&format!("Bearer {token}")) else {
                return Err(
                    "the admin token has characters that cannot be sent, such as a line break; check --token or \
                     TIDEGATE_ADMIN_TOKEN"
                        .to_owned(),
                );
            };
            request = request.header("authorization", token);
        }
        let text = self.body.unwrap_or_default();
        let request = request
            .body(text)
            .map_err(|error| format!("the request is not valid HTTP: {error}"))?;
        let mut response = agent
            .run(request)
            .map_err(|error| unreachable(&address, &error, is_tls))?;
        let body = response.body_mut().with_config().limit(MAX_RESPONSE_BYTES);
        let text = body.read_to_string().map_err(|error| {
            let problem = describe(&error);
            format!("cannot read the response of {address}: {problem}; try again, and check the log of the server")
        })?;
        answered(admin, &address, response.status().as_u16(), &text)
    }
}

/// Interprets a response from the server at `address`.
fn answered(
    admin: &Admin,
    address: &AdminAddress,
    status: u16,
    text: &str,
) -> Result<AdminResponse, String> {
    let document: Value = serde_json::from_str(text).unwrap_or(Value::Null);
    let is_problem = document["detail"].is_string();
    let detail = document["detail"].as_str().unwrap_or_default();
    let field = document["field"].as_str().unwrap_or_default();
    let problem = print::printable(&naming_option(field, detail));
    match status {
        200..=299 if document.is_object() => Ok(AdminResponse::Document(document)),
        // A server that is not ready responds to probes with 503.
        503 if document["ready"] == false => Ok(AdminResponse::Document(document)),
        404 if is_problem && !detail.starts_with("there is nothing at this path") => {
            Ok(AdminResponse::Problems(vec![problem]))
        }
        404 if detail.contains("/v1/status") => Err(format!(
            "the server at {address} does not support this command, because its version differs from the version of \
             this program, {}; see `tidegate status`",
            env!("CARGO_PKG_VERSION")
        )),
        // The response lists the errors in a file. Each error is printed on its own line.
        422 if is_problem => {
            let mistakes = document["mistakes"].as_array().into_iter().flatten();
            let mistakes = mistakes.filter_map(Value::as_str).map(str::to_owned);
            Ok(AdminResponse::Problems(
                std::iter::once(problem).chain(mistakes).collect(),
            ))
        }
        401 => Err(match admin.token() {
            None => "the server requires its admin token; pass the token with --token, or in TIDEGATE_ADMIN_TOKEN",
            Some(_) => {
                "the token of --token or TIDEGATE_ADMIN_TOKEN is not the admin token of the server; see `admin` in the \
                 server's rules file"
            }
        }
        .to_owned()),
        403 if is_problem && admin.token().is_none() => Err(format!(
            "the server at {address} has no admin token, so it serves only requests to 127.0.0.1, [::1] or \
             localhost; pass one of these addresses with --admin, or set `admin.token_env` in the server's rules file"
        )),
        429 => Err(
            "the server has received too many invalid admin tokens from this address, and now checks only one token \
             per second from it; check --token or TIDEGATE_ADMIN_TOKEN, and try again in a second"
                .to_owned(),
        ),
        200..=299 | 404 => Err(not_admin(address)),
        _ if is_problem => Err(problem),
        status => Err(format!(
            "{}; it responded with status {status}",
            not_admin(address)
        )),
    }
}

/// The fields and parameters of requests whose values come from options, each with its option.
const OPTIONS: [(&str, &str); 14] = [
    ("after", "--after"),
    ("by", "--by"),
    ("cost", "--cost"),
    ("for", "--for"),
    ("limits", "--limit"),
    ("n", "-n"),
    ("over", "--over"),
    ("plan", "--plan"),
    ("raw", "--raw"),
    ("reason", "--reason"),
    ("search", "--search"),
    ("since", "--since"),
    ("until", "--until"),
    ("wide", "--wide"),
];

/// Returns the server's `detail` about an invalid `field` with the option in place of the field, if
/// the value of the field comes from an option.
fn naming_option(field: &str, detail: &str) -> String {
    let option = OPTIONS.iter().find(|(known, _)| *known == field);
    let problem = detail
        .strip_prefix(field)
        .and_then(|rest| rest.strip_prefix(": "));
    let Some(((_, option), problem)) = option.zip(problem) else {
        return detail.to_owned();
    };
    // The advice may name other fields.
    let named = OPTIONS
        .iter()
        .fold(problem.to_owned(), |text, (field, option)| {
            text.replace(&format!("`{field}`"), &format!("`{option}`"))
        });
    format!("{option}: {named}")
}

fn not_admin(address: &AdminAddress) -> String {
    format!(
        "{address} is not a Tidegate admin endpoint; pass the address of the admin endpoint with --admin or \
         TIDEGATE_ADMIN"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_about_a_field_names_the_option() {
        for (field, detail, expected) in [
            ("until", "until: is in the past", "--until: is in the past"),
            ("n", "n: must be a number", "-n: must be a number"),
            (
                "until",
                "until: is too late; for no end, use `for` instead of `until`",
                "--until: is too late; for no end, use `--for` instead of `--until`",
            ),
            ("limits", "limits: is missing", "--limit: is missing"),
            ("key", "key: is too long", "key: is too long"),
            (
                "entries.ip",
                "entries.ip: is not an IP address",
                "entries.ip: is not an IP address",
            ),
            (
                "for",
                "the server is shutting down",
                "the server is shutting down",
            ),
            ("", "nothing", "nothing"),
        ] {
            assert_eq!(naming_option(field, detail), expected);
        }
    }

    #[test]
    fn the_error_for_too_many_wrong_tokens_names_the_wait_of_the_server() {
        let admin = Admin {
            address: "127.0.0.1:8082".to_owned(),
            admin_ca: None,
            admin_cert: None,
            admin_key: None,
            token: Some("guess".to_owned()),
            json: false,
        };
        let address = AdminAddress::parse(&admin.address).unwrap();
        let Err(problem) = answered(&admin, &address, 429, "") else {
            panic!("429 is an error");
        };
        assert!(
            problem.contains("checks only one token per second"),
            "{problem}"
        );
        assert!(!problem.contains("minute") && !problem.contains("guess"));
    }
}
