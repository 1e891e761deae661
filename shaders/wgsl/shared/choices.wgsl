// Where a mixture's kernels find the choices of its rows in `words`. A choice is a row's expert of some rank; it has a place in
// the order by expert. Five sections: the expert and the weight (f32 bits) and the place of each choice, the expert of each
// place, and each expert's first place, with the end of the last behind them. The including file has `params.choices`.
fn expert_of(choice: u32) -> u32 {
    return choice;
}

fn weight_of(choice: u32) -> u32 {
    return params.choices + choice;
}

fn place_of(choice: u32) -> u32 {
    return 2u * params.choices + choice;
}

fn expert_at(place: u32) -> u32 {
    return 3u * params.choices + place;
}

fn start_of(expert: u32) -> u32 {
    return 4u * params.choices + expert;
}
