//! `schema.json` is made from the types of [`crate::result`], docs included.

use schemars::generate::SchemaSettings;
use schemars::transform::{Transform, transform_subschemas};
use serde_json::Value;

use crate::result::Results;

const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/schema.json");

/// Objects have the properties that they have, and no others.
#[derive(Clone)]
struct Strict;

impl Transform for Strict {
    fn transform(&mut self, schema: &mut schemars::Schema) {
        transform_subschemas(self, schema);
        if schema.get("properties").is_some() {
            schema.insert("additionalProperties".to_owned(), Value::Bool(false));
        }
    }
}

fn generated() -> String {
    let settings = SchemaSettings::draft2020_12().for_serialize().with_transform(Strict);
    let mut schema = settings.into_generator().into_root_schema_for::<Results>();
    schema.insert("title".to_owned(), "Results of blkq bench".into());
    serde_json::to_string_pretty(&schema).unwrap() + "\n"
}

#[test]
fn the_schema_is_that_of_the_results() {
    let generated = generated();
    if std::env::var_os("BLKQ_WRITE_SCHEMA").is_some() {
        std::fs::write(FILE, &generated).unwrap();
    }
    let committed = std::fs::read_to_string(FILE).unwrap_or_default();
    assert!(
        committed == generated,
        "schema.json is not that of the results any more: \
         BLKQ_WRITE_SCHEMA=1 cargo test -p blkq-bench schema writes it anew"
    );
}

#[test]
fn results_survive_the_way_to_json_and_back() {
    let json: Value = serde_json::from_str(include_str!("../tests/hostile.json")).unwrap();
    let results: Results = serde_json::from_value(json.clone()).unwrap();
    assert_eq!(serde_json::to_value(&results).unwrap(), json);
}
