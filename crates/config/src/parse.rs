//! Parses a rules file: reads each section, and then runs the lints.

use crate::{
    AdminToken, Config, Mistake, candidate, denials, envoy, events, geoip, grpc, headers, identity,
    lint, listen, privacy, proxy, quotas, record,
    report::Report,
    reservations, response_listener, rules, secrets, shutdown, store, top,
    value::{Fields, Value},
    yaml::{self, YamlDialect},
};

/// The maximum size of a rules file, in bytes.
pub const MAX_FILE_BYTES: usize = 16 << 20;

/// The top-level keys of the file.
const SECTIONS: &[&str] = &[
    "listen",
    "store",
    "defaults",
    "headers",
    "clients",
    "entries",
    "geoip",
    "admin",
    "grpc",
    "envoy",
    "allow",
    "plans",
    "rules",
    "candidate",
    "quotas",
    "proxy",
    "shutdown",
    "privacy",
    "top",
    "denials",
    "events",
    "record",
    "reservations",
];

impl Config {
    /// Parses the contents of a rules file.
    ///
    /// # Errors
    ///
    /// Returns every error in the file, sorted by line. Examples of errors are invalid YAML, an
    /// unknown or repeated key, a missing value, a value of the wrong type, or an invalid limit.
    /// The list of errors is never empty.
    ///
    /// # Examples
    ///
    /// ```
    /// use tidegate_config::Config;
    ///
    /// let config = Config::parse("listen: {http: 127.0.0.1:8000, resp: off}").unwrap();
    /// assert_eq!(config.listen.http, Some(([127, 0, 0, 1], 8000).into()));
    /// assert_eq!(config.listen.resp, None);
    ///
    /// let mistakes = Config::parse("lisen: {}\nrules: 5\n").unwrap_err();
    /// assert_eq!(
    ///     mistakes[0].to_string(),
    ///     "lisen (line 1): unknown key `lisen`; did you mean `listen`?"
    /// );
    /// assert_eq!(
    ///     mistakes[1].to_string(),
    ///     "rules (line 2): expected a list of rules, got the number 5"
    /// );
    /// ```
    pub fn parse(text: &str) -> Result<Self, Vec<Mistake>> {
        if text.len() > MAX_FILE_BYTES {
            let message = format!(
                "the file has {} bytes, which exceeds the maximum of {MAX_FILE_BYTES}",
                text.len()
            );
            return Err(vec![Mistake {
                path: String::new(),
                line: None,
                message,
            }]);
        }
        let document = yaml::parse(text, YamlDialect::Strict).map_err(|mistake| vec![mistake])?;
        let mut report = Report::default();
        let mut config = Self::default();
        let root = Value::root(&document.root);
        if let Some(file) = root.fields(&mut report, "a map of settings", SECTIONS) {
            config.fill(&file, &mut report);
        }
        config.warnings = report.finish()?;
        Ok(config)
    }

    /// Reads all sections of `file`. Some sections are also kept as written, because the lints or
    /// the code that reads other sections need this form.
    fn fill(&mut self, file: &Fields<'_>, report: &mut Report) {
        (self.admin_token, self.operator_tokens) = secrets::admin_tokens(file, report);
        let raw_listen;
        let has_token = self.admin_token != AdminToken::None || !self.operator_tokens.is_empty();
        (raw_listen, self.listen, self.listeners) = listen::listen(file, has_token, report);
        let store = store::store(file, report);
        (self.memory, self.snapshot, self.redis) = (store.memory, store.snapshot, store.redis);
        self.headers = headers::headers(file, report);
        self.grpc = grpc::grpc(file, report);
        listen::warn_of_open(
            &raw_listen,
            &self.listen,
            &self.listeners,
            &self.grpc,
            report,
        );
        self.key_privacy = privacy::privacy(file, self.redis.is_some(), report);
        self.record = record::record(file, &self.key_privacy, report);
        self.top = top::top(file, report);
        self.reservations = reservations::reservations(file, self.redis.is_some(), report);
        self.envoy = envoy::envoy(file, report);
        self.shutdown = shutdown::shutdown(file, report);
        self.denials = denials::denials(file, report);
        self.events = events::events(file, report);
        self.identity = identity::identity(file, report);
        self.geoip = geoip::geoip(file, report);
        let raw_rules;
        (raw_rules, self.rules) = rules::rule_set(file, report);
        self.candidate = candidate::candidate(file, report);
        self.quotas = quotas::quotas(file, &self.listen, report);
        let raw_proxy;
        (raw_proxy, self.proxy) = proxy::proxy(file, &self.listen, report);
        let has_proxy = raw_proxy.is_written;
        listen::warn_of_none(&raw_listen, has_proxy, &self.listen, report);
        response_listener::check(
            &raw_rules.rules,
            has_proxy,
            &self.listen,
            &self.grpc,
            report,
        );
        lint::bypass::warn(
            &self.rules,
            &raw_rules.rules,
            &self.identity.derived,
            report,
        );
        lint::plan_choice::warn(
            &raw_rules.rules,
            &self.identity.derived,
            &self.identity.trust,
            report,
        );
        if let Some(proxy) = &self.proxy {
            lint::proxy::warn(proxy, &raw_proxy.upstreams, &self.rules, report);
        }
        lint::exact_path::warn(&raw_rules.rules, report);
        lint::implied_limit::warn(&self.rules, &raw_rules.rules, report);
        lint::no_burst::warn(&raw_rules, report);
        lint::dead_conditions::warn(&raw_rules, &raw_proxy.upstreams, self, report);
    }
}
