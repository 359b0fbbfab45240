//! A lint that warns about limits such as `{rate: 5/min}`, which look like the short form `5/min`.
//!
//! The short form admits 5 requests in any minute. The limit with the field `rate` uses the GCRA
//! algorithm, which admits one request every 12 seconds if there is no `burst`. If the author means
//! GCRA without a burst, writing `burst: 0` or `algorithm: gcra` disables the warning.

use tidegate_core::{Rate, Span};

use crate::{limits::RawLimit, report::Report, rules::RawRules};

/// The code of the warning, by which users can search for it.
const CODE: &str = "no-burst";

/// The maximum number of warnings from this lint.
const MAX_WARNINGS: usize = 20;

/// Warns about limits that use GCRA without a burst only because they have the field `rate`.
pub(crate) fn warn(raw: &RawRules<'_>, report: &mut Report) {
    if raw.default_algorithm.is_some() {
        return;
    }
    let rules = raw.rules.iter().filter(|rule| rule.algorithm.is_none());
    let limits = rules.flat_map(|rule| &rule.limits);
    let unaware = limits.filter_map(|limit| Some((rate_alone(limit)?, limit)));
    for (rate, limit) in unaware.take(MAX_WARNINGS) {
        limit.span.warn(report, message(rate));
    }
}

/// Returns the rate of a limit that has neither `burst` nor `algorithm`. Returns `None` for a rate
/// of one request per period, at which GCRA and the short form admit the same requests.
fn rate_alone(limit: &RawLimit) -> Option<Rate> {
    let spec = limit.full_form.as_ref()?;
    let is_alone = spec.burst.is_none() && spec.algorithm.is_none();
    spec.rate.filter(|rate| is_alone && rate.count > 1)
}

fn message(rate: Rate) -> String {
    let micros = rate.period.as_micros();
    let every = if micros.is_multiple_of(rate.count) {
        Span::from_micros(micros / rate.count).to_string()
    } else {
        format!("{}/{}", rate.period, rate.count)
    };
    let (count, burst) = (rate.count, rate.count - 1);
    format!(
        "{CODE}: this is a GCRA without a burst, which admits 1 request at once and then one every {every}; write \
         {rate} to admit {count} in any period, add `burst: {burst}` to admit {count} at once, or add `burst: 0` if \
         the even spacing is intended"
    )
}

#[cfg(test)]
mod tests {
    use crate::Config;

    fn warnings(file: &str) -> Vec<String> {
        let config = Config::parse(file).unwrap();
        config.warnings.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_rate_without_a_burst_is_a_warning() {
        let rules = "rules:\n  - {name: a, limits: [9/s, {rate: 5/min}]}\n  - {name: b, limits: {rate: 7/s, soft: 10%}}\n";
        let expected = [
            "rules[0].limits[1] (line 2): no-burst: this is a GCRA without a burst, which admits 1 request at once \
             and then one every 12s; write 5/min to admit 5 in any period, add `burst: 4` to admit 5 at once, or add \
             `burst: 0` if the even spacing is intended",
            "rules[1].limits (line 3): no-burst: this is a GCRA without a burst, which admits 1 request at once and \
             then one every 1s/7; write 7/s to admit 7 in any period, add `burst: 6` to admit 7 at once, or add \
             `burst: 0` if the even spacing is intended",
        ];
        assert_eq!(warnings(rules), expected);
    }

    #[test]
    fn a_declared_algorithm_or_burst_is_no_warning() {
        for file in [
            "rules: [{name: a, limits: [5/min]}]",
            "rules: [{name: a, limits: [{rate: 5/min, burst: 0}]}]",
            "rules: [{name: a, limits: [{rate: 5/min, burst: 4}]}]",
            "rules: [{name: a, limits: [{rate: 5/min, algorithm: gcra}]}]",
            "rules: [{name: a, limits: [{rate: 5/min}], algorithm: gcra}]",
            "rules: [{name: a, limits: [5/min], algorithm: gcra}]",
            "rules: [{name: a, limits: [{rate: 1/12s}]}]",
            "{defaults: {algorithm: gcra}, rules: [{name: a, limits: [{rate: 5/min}]}]}",
        ] {
            assert!(warnings(file).is_empty(), "{file}");
        }
    }

    #[test]
    fn the_number_of_warnings_is_bounded() {
        let rule = |at: usize| format!("  - {{name: r{at}, limits: [{{rate: 5/min}}]}}\n");
        let rules: String = (0..50).map(rule).collect();
        assert_eq!(warnings(&format!("rules:\n{rules}")).len(), 20);
    }
}
