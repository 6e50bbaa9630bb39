"""What `mpidist doctor` judges by: findings, what they are drawn from, and the checks that draw them.

To add a finding, write its check in one of the modules ``*_checks`` and give it a row in `checks.CHECKS`.
"""
