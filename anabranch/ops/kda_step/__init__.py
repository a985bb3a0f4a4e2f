"""The whole KDA decode step between projections and o_proj as one operation."""
