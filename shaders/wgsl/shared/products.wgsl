// Products of few rows: a team of lanes makes SPAN outputs for each of ROWS rows of x, so that a weight is read once and a row of
// x once for SPAN outputs. Lanes take items of the weight's rows in turn. The including file defines x_at(source, k): quad k of
// the row of x that begins at `source`, by its own measure.
const ROWS = ${ROWS}u;
const SPAN = 4u;
const OUTPUTS = SPAN * ROWS;

// A team's number among those of its workgroup, how many there are, and a lane's among its lanes.
struct Team {
    index: u32,
    count: u32,
    lane: u32,
    lanes: u32,
}

// A lane's part of the team's outputs: output r * SPAN + s is of the row of x at sources[r] and the row of the weight whose first
// item is weights[s].
fn products(weights: array<u32, SPAN>, sources: array<u32, ROWS>, items: u32, team: Team) -> array<f32, OUTPUTS> {
    var first = weights;
    var from_x = sources;
    var totals: array<f32, OUTPUTS>;
    for (var i = team.lane; i < items; i += team.lanes) {
        var own: array<Item, SPAN>;
        for (var s = 0u; s < SPAN; s++) {
            own[s] = item(first[s] + i);
        }
        for (var r = 0u; r < ROWS; r++) {
            var x: array<vec4<f32>, ITEM>;
            for (var j = 0u; j < ITEM; j++) {
                x[j] = x_at(from_x[r], quad_of(i, j));
            }
            for (var s = 0u; s < SPAN; s++) {
                totals[r * SPAN + s] += item_dot(own[s], x);
            }
        }
    }
    return totals;
}
