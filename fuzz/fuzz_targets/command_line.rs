#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| blkq_fuzz::command_line::check(input));
