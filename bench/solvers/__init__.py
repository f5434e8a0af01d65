"""The solvers side by side with their peers, from the instances to the page that is committed.

``fetch`` gets or makes the instances, ``run`` measures, ``report`` writes the page; ``all`` does the three. A cell is
one suite × instance × k × method × seed × time limit, measured by `grace_opt.sweep` in a warm process of its method.
"""
